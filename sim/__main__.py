"""`python -m sim`: the program of `baton simulate`."""

from sim.command import app, run_program

if __name__ == "__main__":
    run_program(app, "baton simulate")
