"""`python -m polar` is the `polar` command."""

from polar.cli.main import main

if __name__ == "__main__":
    main()
