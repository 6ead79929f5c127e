"""The benchmarks that ``bench.py`` runs: brokers side by side, and ours beside bare PostgreSQL.

``plan`` says what is measured with how much, ``targets`` what is to be reached.  Each measure is a
function of a module named in the plan and runs in a process of its own (``child``), which learns
from its environment (``context``) which broker it is for.
"""
