"""What the machine does around a run: its disk, files of strangers, progress on a terminal."""
