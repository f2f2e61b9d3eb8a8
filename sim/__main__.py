"""`python -m sim`: the program behind `baton simulate`."""

from sim.command import app, run_program

if __name__ == "__main__":
    run_program(app, "baton simulate")
