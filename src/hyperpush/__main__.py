"""`python -m hyperpush`: the command line where its script is not on the path."""

from hyperpush.cli.app import main

if __name__ == "__main__":
    main()
