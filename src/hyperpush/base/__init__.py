"""Base for all other packages: errors, status, options and their ranges, schedules, files, settings, processes."""
