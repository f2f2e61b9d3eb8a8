"""What a checkpoint's small files say of its model, read alike by routers and workers: neither
imports the other."""
