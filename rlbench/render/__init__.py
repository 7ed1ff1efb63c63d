"""Reports for people: the terminal, Markdown, CSV. Everything from a report is untrusted text."""
