"""What training costs in memory, before it runs: closed forms, and the bytes they are held against.

`arch` and `models` hold what of a model decides the bytes, `plan` the arithmetic and `cost` its
table; `measure` counts the same bytes in a real step on the CPU; `published` sets the paper's
averages beside them.
"""
