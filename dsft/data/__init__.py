"""From files and hub names to the batches that a model trains on.

sources         rows of txt, json, jsonl, csv, parquet, arrow (.gz, .bz2, .xz, .zst) and of hub data sets
formats, chats  a row as text, prompt and completion, or chat in a template; which of its text is trained
tokenization    rows -> token sequences, with the policy for what is too long
prepare         done once for all ranks, on all cores, kept on disk under a fingerprint
batches         what an epoch is made of, also from a corpus that is never kept; which sequences share a row or a batch,
                in which order they come, and the tensors of a batch
training_data   from the options to the Trainer's items
"""
