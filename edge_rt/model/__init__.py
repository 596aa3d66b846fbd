"""What a GPT-J is: its tensors, its arithmetic, its graph."""
