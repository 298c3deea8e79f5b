"""What the plugin gains and costs, measured; `gpu` is the run for a machine with a CUDA GPU."""
