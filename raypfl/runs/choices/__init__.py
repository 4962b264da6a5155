"""What the settings of a run leave open, settled before it starts: executor, actors on a GPU, pretrained weights."""
