"""Readers of a checkpoint's small files, shared by routers and workers, which do not import each
other.
"""
