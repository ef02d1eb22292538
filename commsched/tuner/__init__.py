"""Tuning of partition and credit while training runs; see docs/tuning.md.

space       what may be chosen           searchers   what to try next, by name
meter       every rank: step times       online      what a session adds, and rank 0's thread
trials      rank 0: windows of all ranks search      one search of a running training
tuning      the search and its honest end, over anything that can measure
journal     trials kept in a file        tuned       the result, and the jobs that it is for
drift       when to tune again
"""
