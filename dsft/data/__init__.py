"""From files and hub names to the batches that a model trains on.

readers, sources     rows of txt, json, jsonl, csv, parquet, arrow (.gz, .bz2, .xz, .zst) and of hub data sets
formats, chats       a row as text, prompt and completion, or chat in a template; which of its tokens are trained
tokenization         rows -> token sequences, with the policy for what is too long
prepare, token_store done once for all ranks, on all cores, kept on disk under a fingerprint
sequences            what an epoch is made of: windows of text, samples, sources mixed by weight
packing, batches     which sequences share a row or a batch, in which order, and the tensors of them
streaming            the same from a corpus that is never kept
training_data        from the options to the Trainer's items
"""
