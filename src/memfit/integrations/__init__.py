"""Steps from other projects' own configurations, one file a project. A project is imported when its file is used."""
