"""`python -m jacstore`: the command line where no script is on the path."""

from jacstore.cli.commands import main

if __name__ == "__main__":
    main(prog_name="jacstore")
