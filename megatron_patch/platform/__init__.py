"""What makes one code base run on CPU ranks and on GPUs."""
