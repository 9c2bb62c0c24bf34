"""From files and hub names to the batches that a model trains on.

sources         rows of txt, json, jsonl, csv, parquet, arrow (.gz, .bz2, .zst) and of hub data sets
formats, chats  a row as text, prompt and completion, or chat in a template; the trained part of its text
tokens          rows -> token sequences, computed once for all ranks, on all cores, and cached on disk by fingerprint
epoch           packing of sequences into rows and batches, their order, and the tensors of a batch
training_data   from the options to the Trainer's items
"""
