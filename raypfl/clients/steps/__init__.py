"""Local steps that a method takes one by one."""
