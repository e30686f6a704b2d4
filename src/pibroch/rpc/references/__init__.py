"""Remote references: who refers to which value on which worker, and when a value is dropped.

The protocol itself (``table.py``, ``owner.py``, ``user.py``, ``messages.py``) is pure: no sockets,
threads or clocks.
"""
