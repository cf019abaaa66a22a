"""`python -m examples.support_bot`."""

from examples.support_bot.app import main

if __name__ == "__main__":
    main()
