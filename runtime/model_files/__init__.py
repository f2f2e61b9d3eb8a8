"""Readers of a checkpoint's small files, shared by routers and workers."""
