"""One reader per public trace format; `pagecast.traces.read` picks among them by a file's content."""
