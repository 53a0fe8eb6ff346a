"""Evaluation tasks of lm-evaluation-harness from local files, with and without the policy.

``files`` reads task files and refuses what could run code or fetch something. On rank 0 ``harness`` has the package
turn documents into requests and answers into scores, and ``model`` is the language model that it asks; ``lockstep`` has
all ranks answer in step; ``compare`` makes before and after of it, and ``session`` ties them together. The package is
imported in ``harness`` alone.
"""
