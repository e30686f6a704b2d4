"""Embedding servers: processes that hold the homes of rows for trainers, reached by the tensor RPC."""
