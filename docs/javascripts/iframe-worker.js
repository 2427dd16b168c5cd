// Browsers start no worker for a page that is read from disk, and the site's search is one. There its script runs in a
// hidden frame instead, which it cannot tell from a worker: it gets messages, posts them, and loads further scripts.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open(); // otherwise Firefox replaces the empty document when it is done loading
      inside.document.write("<!doctype html><body></body>");
      inside.document.close();
      const load = (source) =>
        new Promise((done, fail) => {
          const script = inside.document.createElement("script");
          script.onload = done;
          script.onerror = fail;
          script.src = source;
          inside.document.body.append(script);
        });
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.loaded = load(url);
    }

    async postMessage(data) {
      await this.loaded;
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
