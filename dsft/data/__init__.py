"""From files and hub names to the batches that a model trains on.

files, sources     rows of txt, json, jsonl, csv, parquet, arrow (.gz, .zst) and of hub data sets, with the place of
each
shapes, chat       what a row is: text, prompt and completion, or a chat in a template; what of it is trained
tokens             rows -> token sequences, with the policy for what is too long
prepare, store     done once for all ranks, on all cores, kept on disk under a fingerprint
sequences          what an epoch is made of: windows of text, samples, sources mixed by weight
packing, batches   which sequences share a row or a batch, in which order, and the tensors of them
streaming          the same from a corpus that is never kept
preview            what the model will see
"""
