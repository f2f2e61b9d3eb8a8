"""The shipped demo model: the text it was trained on, the seeded trainers, and the checkpoint
itself."""
