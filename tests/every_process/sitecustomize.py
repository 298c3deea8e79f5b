"""Python runs this at the start of every process of the suite.

Importing vLLM makes a million objects that stay. With Python's own thresholds a fifth of the import
is spent on looking for garbage among them, and the suite's processes import vLLM some sixty times.
"""

import gc

gc.set_threshold(100_000, 50, 100)
