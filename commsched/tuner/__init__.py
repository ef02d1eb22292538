"""Tuning of partition and credit while training runs; see docs/tuning.md.

online      rank 0's tuner thread                      job          one search in a running training
search_run  the search loop and its final comparison   stats        comparison and drift detection
space       the configurations to choose from          searchers    proposals of the next configuration, by name
meter       step times, on every rank                  trials       windows of all ranks, on rank 0
profiler    measured layer and link times              model        simulated step times (run by model_process)
journal     the file that keeps trials                 result    the verdict, and the tuned file
auto        sizes without trials                       assessment  the cost of communication, in two lines
"""
