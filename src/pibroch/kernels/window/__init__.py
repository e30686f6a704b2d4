"""What is touched when: the bookkeeping of the lookahead oracle."""
