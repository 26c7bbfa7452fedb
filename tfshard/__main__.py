"""`python -m tfshard`: the command line."""

from tfshard.cli import main

if __name__ == "__main__":
    main()
