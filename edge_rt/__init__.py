"""edge_rt: an INT4 inference runtime for GPT-J on NVIDIA Jetson, and on any CPU."""

__version__ = "0.1.0"
