"""The teaching tools: exercises and their graders, figures, the doctor."""
