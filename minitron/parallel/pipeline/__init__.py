"""Pipeline parallelism: schedules, what each rank does, and how it does it."""
