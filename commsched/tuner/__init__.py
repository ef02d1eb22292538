"""Tuning of partition and credit while training runs; see docs/tuning.md.

space       what may be chosen           searchers   what to try next, by name
meter       every rank: step times       online      rank 0: a thread that makes the trials
tuning      the search and its honest end, over anything that can measure
journal     trials kept in a file        tuned       the result, and the jobs that it is for
"""
