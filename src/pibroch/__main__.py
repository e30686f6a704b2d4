"""``python -m pibroch`` is the command line."""

from pibroch.cli.main import main

main()
