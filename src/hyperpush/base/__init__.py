"""What every other room may use: errors, status, options and their ranges, schedules, files, settings, processes."""
