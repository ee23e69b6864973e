// Search in a folder. Browsers start no worker from file://; there this one runs the worker's script in a hidden frame.
// Zensical loads a script from another host unless one is given whose name has "iframe-worker" in it.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = this.inside.document.createElement("script");
      script.src = address;
      this.loaded = new Promise((resolve) => { script.onload = resolve; });
      script.onerror = () => this.onerror?.(new Event("error", { cancelable: true }));
      this.inside.document.body.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.inside.onmessage?.({ data });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
