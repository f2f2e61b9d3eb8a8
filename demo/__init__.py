"""The shipped demo model: its training corpus, the seeded trainers, and the checkpoint."""
