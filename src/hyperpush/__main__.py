"""Run the command line as `python -m hyperpush`, for environments whose PATH lacks the `hyperpush` script."""

from hyperpush.cli.app import main

if __name__ == "__main__":
    main()
