"""Messages between processes, carried by vLLM's own objects: how to attach and read each one."""
