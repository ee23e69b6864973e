"""A folder that is put on the path of the package `deepspeed.ops`: what is in it can be imported from there."""
