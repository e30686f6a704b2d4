"""The hot path: `<op>/naive.py` says what is meant, `<op>/numba.py` is what runs.

NumPy in, NumPy out.
"""
