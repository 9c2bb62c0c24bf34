"""From files and hub names to the batches that a model trains on.

sources         rows of txt, json, jsonl, csv, parquet, arrow (.gz, .bz2, .zst) and of hub data sets
formats, chats  a row as text, prompt and completion, or chat in a template; which of its text is trained
tokens          rows -> token sequences, made once for all ranks, on all cores, and kept on disk under a fingerprint
epoch           which sequences share a row or a batch, in which order they come, and the tensors of a batch
training_data   from the options to the Trainer's items
"""
