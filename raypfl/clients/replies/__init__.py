"""What a group of clients sends back: reduced for its round or, in an asynchronous run, for each of several."""
