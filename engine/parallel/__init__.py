"""Several GPUs as one: the processes, how steps reach them, and how they add up."""
