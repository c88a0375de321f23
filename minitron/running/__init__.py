"""What a run needs beside its loop: checks, its folder, memory, stopping, the state that trains."""
