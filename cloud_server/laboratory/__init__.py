"""The laboratory: experiments on one machine without a broker, with the fleet's algorithms, codecs and client loop."""
