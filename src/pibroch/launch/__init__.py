"""A run's processes: what they are, as data, and who starts and looks after them.

See the README beside this, and docs/design/0029-one-launcher.md.
"""
