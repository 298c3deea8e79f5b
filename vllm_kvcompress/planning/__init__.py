"""From lengths alone: what is kept, when, in how many blocks and in how much memory."""
