"""`python -m tfshard`: the command line."""

from tfshard.command_line import main

if __name__ == "__main__":
    main()
