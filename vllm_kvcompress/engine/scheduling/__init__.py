"""The scheduler side of compression: admission, packing plans, block management, statistics."""
